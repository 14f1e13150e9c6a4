"""The pocket model: a small Mixture-of-Experts language model, trained and shipped by this project.

Importing this package is light: it only knows where the bundled checkpoint lies. `corpus.py`
gathers the training text, `texts.py` writes it as files, `train.toml` is the run for
`moe-runtime train`, `evaluate.py` measures and writes the model card.
"""

from pathlib import Path


def pocket_path() -> Path:
    """The checkpoint's folder in a checkout, in the layout of `from_pretrained`."""
    folder = Path(__file__).resolve().parent
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"the pocket model's {name} is missing from {folder}: an installed package comes "
                "without its weights; take the folder models/pocket of a checkout, or train it "
                "again with `moe-runtime train models/pocket/train.toml`"
            )
    return folder
