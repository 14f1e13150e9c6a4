"""``moe-runtime bench``: a model beside other systems, servers, kernels, whose tiles it picks."""

import typer

from moe_runtime.benchmarks.commands import layers, machine, quality, report, serve, texts, traces
from moe_runtime.cli.strict import StrictCommand, expanded

_COMMANDS = {
    "kernels": machine.bench_kernels,
    "latency": texts.bench_latency,
    "throughput": texts.bench_throughput,
    "quality": quality.bench_quality,
    "io": machine.bench_io,
    "experts": layers.bench_experts,
    "layer": layers.bench_layer,
    "ops": layers.bench_ops,
    "training": layers.bench_training,
    "ablation": machine.bench_ablation,
    "policies": traces.bench_policies,
    "predictors": traces.bench_predictors,
    "placements": traces.bench_placements,
    "dispatch": machine.bench_dispatch,
    "serve": serve.bench_serve,
    "compare": report.bench_compare,
    "report": report.bench_report,
}


def bench_app() -> typer.Typer:
    app = typer.Typer()
    for name, command in _COMMANDS.items():
        app.command(name, cls=StrictCommand)(expanded(command))
    app.callback()(lambda: None)
    return app
