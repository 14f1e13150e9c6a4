"""What the suite promises of itself: no test depends on a clock."""

from pathlib import Path

from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent


def test_no_example_of_a_property_is_timed() -> None:
    assert settings.default is not None
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check
    # Set once, in conftest.py: what a test sets for itself is forgotten in the next one.
    own = [
        path.relative_to(TESTS)
        for path in TESTS.rglob("test_*.py")
        if path != Path(__file__)
        and any(word in path.read_text() for word in ("deadline=", "suppress_health_check"))
    ]
    assert own == []
