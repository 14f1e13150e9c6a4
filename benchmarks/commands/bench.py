"""``moe-runtime bench``: a model beside other systems, servers, kernels, whose tiles it picks."""

import typer

from moe_runtime.benchmarks.commands.ablation import bench_ablation
from moe_runtime.benchmarks.commands.compare import bench_compare
from moe_runtime.benchmarks.commands.dispatch import bench_dispatch
from moe_runtime.benchmarks.commands.expert_layer import bench_experts
from moe_runtime.benchmarks.commands.io import bench_io
from moe_runtime.benchmarks.commands.kernels import bench_kernels
from moe_runtime.benchmarks.commands.latency import bench_latency
from moe_runtime.benchmarks.commands.layer import bench_layer
from moe_runtime.benchmarks.commands.ops import bench_ops
from moe_runtime.benchmarks.commands.placements import bench_placements
from moe_runtime.benchmarks.commands.policies import bench_policies
from moe_runtime.benchmarks.commands.predictors import bench_predictors
from moe_runtime.benchmarks.commands.report import bench_report
from moe_runtime.benchmarks.commands.serve import bench_serve
from moe_runtime.benchmarks.commands.throughput import bench_throughput
from moe_runtime.benchmarks.commands.training import bench_training
from moe_runtime.cli.strict import StrictCommand


def bench_app() -> typer.Typer:
    """The group of commands."""
    app = typer.Typer()
    app.command("kernels", cls=StrictCommand)(bench_kernels)
    app.command("latency", cls=StrictCommand)(bench_latency)
    app.command("throughput", cls=StrictCommand)(bench_throughput)
    app.command("io", cls=StrictCommand)(bench_io)
    app.command("experts", cls=StrictCommand)(bench_experts)
    app.command("layer", cls=StrictCommand)(bench_layer)
    app.command("ops", cls=StrictCommand)(bench_ops)
    app.command("training", cls=StrictCommand)(bench_training)
    app.command("ablation", cls=StrictCommand)(bench_ablation)
    app.command("policies", cls=StrictCommand)(bench_policies)
    app.command("predictors", cls=StrictCommand)(bench_predictors)
    app.command("placements", cls=StrictCommand)(bench_placements)
    app.command("dispatch", cls=StrictCommand)(bench_dispatch)
    app.command("serve", cls=StrictCommand)(bench_serve)
    app.command("compare", cls=StrictCommand)(bench_compare)
    app.command("report", cls=StrictCommand)(bench_report)
    app.callback()(lambda: None)
    return app
