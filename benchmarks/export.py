"""Frozen models beside ``Predictive``: how far their numbers are apart, and their time.

    python benchmarks/export.py --threads 1

The posterior is a mean-field guide after one step. The same K draws go through ``Predictive``, the
module of ``bdl.freeze``, the program of ``torch.export`` with any number of rows, and its ONNX file
under onnxruntime (``pip install onnxscript onnxruntime``), at another number of rows than the one
that was exported. Errors are the largest absolute differences of means, sds and probabilities.
"""

import tempfile
from pathlib import Path

import onnxruntime
import torch
from harness import in_turns, parse_sizes, parser, show
from torch import nn
from torch.export import Dim

import pyro_bdl as bdl


def networks():
    """A name, a program and inputs of one row each."""
    perceptron = nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh())
    convolutions = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 10),
    )  # fmt: skip
    attention = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    heads = nn.Sequential(perceptron, nn.Linear(50, 2))
    classes = nn.Sequential(attention, nn.Flatten(), nn.Linear(16 * 32, 10))
    prior = bdl.priors.FanIn(1.0)
    return {
        "MLP 8-50-50-2": (
            bdl.models.HeteroscedasticRegression(bdl.bayesianize(heads, prior)),
            lambda rows: torch.randn(rows, 8),
        ),
        "LeNet with BatchNorm": (
            bdl.models.Classification(bdl.bayesianize(convolutions, prior)),
            lambda rows: torch.randn(rows, 1, 28, 28),
        ),
        "transformer layer": (
            bdl.models.Classification(bdl.bayesianize(classes, prior)),
            lambda rows: torch.randn(rows, 16, 32),
        ),
    }


def numbers(result):
    """Mean and sd, or probabilities, as a tuple of tensors."""
    found = result if isinstance(result, tuple | list) else (result,)
    return tuple(torch.as_tensor(value) for value in found)


def difference(found, expected):
    pairs = zip(numbers(found), numbers(expected), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def compared(model, inputs, draws, rows, repeats):
    """Errors and seconds of each form, at ``rows`` rows."""
    few, x = inputs(4), inputs(rows)
    classes = isinstance(model, bdl.models.Classification)
    y = torch.randint(10, (4,)) if classes else torch.randn(4)
    guide = bdl.guides.AutoMeanField(model).prototype(few, y)
    latents = {name: value[None] for name, value in guide.sample_latents(draws).items()}
    samples = bdl.Samples(latents)
    predictive = bdl.Predictive(model, samples)

    def by_predictive():
        moments = predictive.moments(x)["y"]
        return moments.mean if classes else (moments.mean, moments.variance.sqrt())

    frozen = bdl.freeze(model, samples, few, draws=draws)
    any_rows = ({0: Dim("rows")},)
    exported = torch.export.export(frozen, (few,), dynamic_shapes=any_rows).module()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "frozen.onnx"
        torch.onnx.export(frozen, (few,), path, dynamo=True, dynamic_shapes=any_rows)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(path, options)
    name = session.get_inputs()[0].name
    forms = {
        "Predictive": by_predictive,
        "freeze": lambda: frozen(x),
        "torch.export": lambda: exported(x),
        "ONNX": lambda: session.run(None, {name: x.numpy()}),
    }
    with torch.no_grad():
        expected = by_predictive()
        errors = {form: difference(call(), expected) for form, call in forms.items()}
        seconds = in_turns(forms, repeats)
    ratios = {form: seconds["Predictive"] / value for form, value in seconds.items()}
    return {"errors": errors, "seconds": seconds, "times as fast": ratios}


def main():
    sizes = {"draws": (20, 3, "draws"), "rows": (256, 16, "rows of a prediction")}
    options = parse_sizes(parser(__doc__.splitlines()[0]), sizes)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    results = {
        name: compared(model, inputs, options.draws, options.rows, options.repeats)
        for name, (model, inputs) in networks().items()
    }
    show("Exported predictions", results, options.json)


if __name__ == "__main__":
    main()
