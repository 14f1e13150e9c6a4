"""What a layer would cost on machines that are not at hand."""
