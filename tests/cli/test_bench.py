"""`moe-runtime bench` where there is no GPU to measure."""

import pytest
import torch

from moe_runtime.cli.main import main

needs_none = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")


@needs_none
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "needs a CUDA or ROCm GPU, and torch sees none here"),
        (["--tune"], "needs a CUDA or ROCm GPU, and torch sees none here"),
        (["--tuen"], "No such option: --tuen"),
    ],
)
def test_one_line_and_exit_code_2(options, message, capsys):
    assert main(["bench", "kernels", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err
