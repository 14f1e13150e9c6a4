"""ScMoE's schedule against the closed form of its exposed time, and against a block without one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.lab.simulate.scaling import (
    ShortcutCosts,
    best_shortcut_schedule,
    shortcut_schedules,
)

SECONDS = st.integers(0, 40).map(float)


@settings(max_examples=60)
@given(backbone=st.lists(SECONDS, max_size=4), there=SECONDS, experts=SECONDS, back=SECONDS)
def test_every_position_exposes_what_the_backbone_does_not_hide(backbone, there, experts, back):
    costs = ShortcutCosts(backbone_s=tuple(backbone), there_s=there, experts_s=experts, back_s=back)
    schedules = shortcut_schedules(costs)
    assert [schedule.position for schedule in schedules] == list(range(len(backbone) + 1))
    for schedule in schedules:
        before, after = backbone[: schedule.position], backbone[schedule.position :]
        exposed = max(0.0, there - sum(before)) + max(0.0, back - sum(after))
        assert schedule.exposed_s == pytest.approx(exposed)
        assert schedule.block_s == pytest.approx(sum(backbone) + experts + exposed)
    best = best_shortcut_schedule(costs)
    assert best.block_s == min(schedule.block_s for schedule in schedules)
    alone = ShortcutCosts(
        backbone_s=tuple(backbone[-1:]), there_s=there, experts_s=experts, back_s=back
    )
    assert best.exposed_s <= best_shortcut_schedule(alone).exposed_s + 1e-9


def test_the_paper_s_example():
    """Dispatch fits under the dense feed-forward, combine under the shared expert and attention."""
    costs = ShortcutCosts(backbone_s=(3.0, 4.0, 2.0), there_s=3.0, experts_s=5.0, back_s=6.0)
    best = best_shortcut_schedule(costs)
    assert (best.position, best.exposed_s, best.block_s) == (1, 0.0, 14.0)
    without = ShortcutCosts(backbone_s=(2.0,), there_s=3.0, experts_s=5.0, back_s=6.0)
    assert best_shortcut_schedule(without).exposed_s == 7.0
