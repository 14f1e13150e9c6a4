"""Reproductions of papers. Nothing else imports them, except the commands that switch them on."""
