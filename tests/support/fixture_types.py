"""Short names of pytest's fixtures in signatures."""

import pytest

Capsys = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
