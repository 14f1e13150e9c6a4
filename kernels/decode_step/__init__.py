"""Operations of one token (or a few) per sequence: one file each; `prepared` has linear layers."""
