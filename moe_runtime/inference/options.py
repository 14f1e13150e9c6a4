"""What a loaded model imports only where an option, its gates or a backward pass ask for it."""

from typing import TYPE_CHECKING

from moe_runtime.lazy import lazy_names

if TYPE_CHECKING:
    from moe_runtime.checkpoints.packed_parameter import (
        round_activations as round_activations,
    )
    from moe_runtime.inference.cache_code import coded_experts as coded_experts
    from moe_runtime.inference.cache_code import open_coded_stores as open_coded_stores
    from moe_runtime.inference.cpu_misses.computing import open_misses as open_misses
    from moe_runtime.inference.cpu_misses.option import check_misses as check_misses
    from moe_runtime.inference.device.decoding_model import record_decoding as record_decoding
    from moe_runtime.inference.device.device_experts import DeviceExperts as DeviceExperts
    from moe_runtime.inference.device.device_stores import open_device_stores as open_device_stores
    from moe_runtime.inference.device.device_stores import plan_device as plan_device
    from moe_runtime.inference.device.device_stores import policy_of_device as policy_of_device
    from moe_runtime.inference.expert_gradients import (
        differentiable_experts as differentiable_experts,
    )
    from moe_runtime.inference.expert_gradients import refuse_tangents as refuse_tangents
    from moe_runtime.inference.expert_partition import divide_experts as divide_experts
    from moe_runtime.inference.hugging_face.gate_formulas import find_formula as find_formula
    from moe_runtime.inference.kept_learning import KeptLearning as KeptLearning
    from moe_runtime.inference.prediction.predictors import check_predictor as check_predictor
    from moe_runtime.inference.prediction.predictors import find_gate as find_gate
    from moe_runtime.inference.prediction.predictors import is_file_name as is_file_name
    from moe_runtime.inference.prediction.predictors import learned_bytes as learned_bytes
    from moe_runtime.inference.prediction.predictors import (
        make_live_estimator as make_live_estimator,
    )
    from moe_runtime.inference.prediction.prefetching import open_prefetcher as open_prefetcher
    from moe_runtime.inference.routing_record import check_records as check_records
    from moe_runtime.inference.routing_record import open_record as open_record
    from moe_runtime.inference.step_times import StepTimes as StepTimes
    from moe_runtime.inference.step_times import StoreTimes as StoreTimes
    from moe_runtime.inference.warming import warm_up as warm_up
    from moe_runtime.kernels.expert_mlp import frozen_expert as frozen_expert
    from moe_runtime.lab.replay.choice import choose_policy as choose_policy
    from moe_runtime.lab.traces.predictor_file import read_predictor as read_predictor
    from moe_runtime.lab.traces.predictor_file import (
        read_predictor_signature as read_predictor_signature,
    )
    from moe_runtime.lab.traces.recent import RecentRouting as RecentRouting
    from moe_runtime.lab.traces.recent import read_recent as read_recent
    from moe_runtime.lab.traces.recorder import TraceRecorder as TraceRecorder
    from moe_runtime.lab.traces.timeline import Timeline as Timeline
    from moe_runtime.memory.device.cuda_device import CudaDevice as CudaDevice
    from moe_runtime.parallel.dispatch import as_transport as as_transport
else:
    __getattr__ = lazy_names(
        __name__,
        {
            # several processes
            "moe_runtime.parallel.dispatch": "as_transport",
            "moe_runtime.inference.expert_partition": "divide_experts",
            # a device
            "moe_runtime.inference.device.decoding_model": "record_decoding",
            "moe_runtime.inference.device.device_experts": "DeviceExperts",
            "moe_runtime.inference.cpu_misses.computing": "open_misses",
            "moe_runtime.inference.cpu_misses.option": "check_misses",
            "moe_runtime.inference.device.device_stores": "open_device_stores plan_device "
            "policy_of_device",
            "moe_runtime.memory.device.cuda_device": "CudaDevice",
            "moe_runtime.checkpoints.packed_parameter": "round_activations",
            # experts in a code
            "moe_runtime.inference.cache_code": "coded_experts open_coded_stores",
            # gradients, norms of an expert's outputs
            "moe_runtime.kernels.expert_mlp": "frozen_expert",
            "moe_runtime.inference.expert_gradients": "differentiable_experts refuse_tangents",
            # a gate that the model overrides
            "moe_runtime.inference.hugging_face.gate_formulas": "find_formula",
            # prefetching
            "moe_runtime.inference.prediction.predictors": "check_predictor find_gate "
            "is_file_name learned_bytes make_live_estimator",
            "moe_runtime.inference.prediction.prefetching": "open_prefetcher",
            "moe_runtime.lab.traces.predictor_file": "read_predictor read_predictor_signature",
            # a policy that is chosen by replay, or that learns from requests
            "moe_runtime.lab.replay.choice": "choose_policy",
            "moe_runtime.lab.traces.recent": "RecentRouting read_recent",
            "moe_runtime.inference.kept_learning": "KeptLearning",
            # a trace, a timeline
            "moe_runtime.inference.routing_record": "check_records open_record",
            "moe_runtime.lab.traces.recorder": "TraceRecorder",
            "moe_runtime.lab.traces.timeline": "Timeline",
            "moe_runtime.inference.step_times": "StepTimes StoreTimes",
            "moe_runtime.inference.warming": "warm_up",
        },
    )
