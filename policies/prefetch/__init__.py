"""When a guess is worth reading: one set of rules for the live store and for replay."""

from moe_runtime.policies.prefetch.admission import Admission, PrefetchRules
from moe_runtime.policies.prefetch.controller import Controller, StepCost

__all__ = ["Admission", "Controller", "PrefetchRules", "StepCost"]
