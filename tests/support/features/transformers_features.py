"""What a loaded model answers like transformers, and what it refuses: one table, tried row by row.

`tests/inference/test_features.py` tries every row on a model of transformers and on the same
checkpoint loaded by `moe_runtime`. The page of the documentation is written from the rows:

    PYTHONPATH=tests/support/checkpoints python tests/support/features/transformers_features.py
"""

from __future__ import annotations

from pathlib import Path

import feature_generation
import feature_models
import feature_training
from feature_rows import EQUAL, Feature

FEATURES: list[Feature] = [
    *feature_generation.FEATURES,
    *feature_models.FEATURES,
    *feature_training.FEATURES,
]
PAGE = Path(__file__).parents[3] / "docs" / "transformers-features.md"

_HEAD = """# What a loaded model supports

`moe_runtime.load` gives a model of `transformers`. It answers as the model of `from_pretrained`
does once that is frozen and in evaluation mode. Otherwise it refuses in one line
(`UnsupportedUseError`). `tests/inference/test_features.py` tries every row on both; every public
method and property of `PreTrainedModel` and `GenerationMixin` is in one.

Vision-language models take pictures: `pixel_values` and what else their processor gives, or files
in [commands and requests](serving.md#api).

This page is written by
`PYTHONPATH=tests/support/checkpoints python tests/support/features/transformers_features.py`.
"""


def page() -> str:
    """The page: what works and what is refused, by group."""
    groups: dict[str, dict[str, list[str]]] = {}
    for feature in FEATURES:
        groups.setdefault(feature.group, {}).setdefault(feature.answer, []).append(feature.name)
    parts = [_HEAD]
    for group, answers in groups.items():
        parts.append(f"\n## {group}\n")
        if equal := answers.pop(EQUAL, None):
            parts.append("\nAs transformers:\n\n" + "".join(f"- {name}\n" for name in equal))
        if answers:
            rows = (f"| {'; '.join(names)} | “… {one} …” |\n" for one, names in answers.items())
            parts.append("\n| refused | error |\n|---|---|\n" + "".join(rows))
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
