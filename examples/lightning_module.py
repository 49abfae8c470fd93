"""A posterior trained by Lightning, with the numbers of ``pyro_bdl.training.train``.

    python examples/lightning_module.py

Copy this file and change ``program``. ``Variational`` is the whole adapter. The script trains the
same guide by both, with Adam and with IVON, and prints how far losses and guides differ; then by
Lightning alone with gradients accumulated over micro-batches, products in bfloat16, and a
checkpoint halfway from which a second run goes on. Needs: pip install lightning
"""

import argparse
import logging
import tempfile
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_bdl as bdl

NOISE = 0.2


class Variational(lightning.LightningModule):
    """The bound of a program and its guide, which holds the parameters of both.

    :param optimizer: makes the optimizer of the module's ``objective``.
    :param steps: of the optimizer, over which the learning rate falls to zero along half a cosine.
    """

    def __init__(self, model, guide, optimizer, steps):
        super().__init__()
        self.objective = bdl.elbo.TemperedTraceMeanField_ELBO()(model, guide)
        self.make, self.steps, self.losses = optimizer, steps, []

    def training_step(self, batch, index):
        step = self.objective.take_step(*batch)
        if isinstance(self.optimizer, bdl.optim.IVON):
            self.optimizer.add(step)  # its draw and temperature
        self.losses.append(step.value.detach())
        return step.loss  # Lightning divides it by the number of micro-batches

    def configure_optimizers(self):
        self.optimizer = optimizer = self.make(self.objective)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    # Lightning keeps parameters, optimizer and schedule; with the random numbers a run that goes on
    # from a checkpoint is the one that was never stopped.

    def on_save_checkpoint(self, checkpoint):
        checkpoint["random numbers"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint):
        torch.set_rng_state(checkpoint["random numbers"])


OPTIMIZERS = {
    "Adam": lambda objective: torch.optim.Adam(objective.parameters(), lr=0.01),
    "IVON": lambda objective: bdl.optim.IVON(objective.guide),
}


def simulate(rows):
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, rows)[:, None]
    return x, torch.sin(2 * x[:, 0]) + NOISE * torch.randn(rows)


def program(x, y):
    """A network, its program and a guide with its parameters, the same in every call."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    model = bdl.models.Regression(bdl.bayesianize(net), noise=NOISE, num_data=len(x))
    guide = bdl.guides.AutoMeanField(model).prototype(x, y)
    torch.manual_seed(2)
    return model, guide


def by_lightning(name, data, steps, *, parts=1, start=None, **options):
    """The module after its steps, each over all rows in parts, from the start or a checkpoint."""
    model, guide = program(*data)
    module = Variational(model, guide, OPTIMIZERS[name], steps)
    rows = -(-len(data[0]) // parts)
    # a loader without a generator of its own takes numbers from the guide's
    loader = DataLoader(TensorDataset(*data), batch_size=rows, generator=torch.Generator())
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=steps, accumulate_grad_batches=parts,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        **{"enable_checkpointing": False, **options},
    )  # fmt: skip
    trainer.fit(module, loader, ckpt_path=start)
    return module


def difference(a, b):
    """The largest difference of the means and scales of two guides."""
    pairs = zip(a.loc_and_scale(), b.loc_and_scale(), strict=True)
    return max(float((left - right).detach().abs().max()) for left, right in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    data, steps = simulate(options.rows), options.steps

    for name, make in OPTIMIZERS.items():
        model, guide = program(*data)
        optimizer = make(bdl.elbo.TemperedTraceMeanField_ELBO()(model, guide))
        run = bdl.training.train(model, guide, *data, steps=steps, optimizer=optimizer)
        module = by_lightning(name, data, steps)
        losses = float((run.losses - torch.stack(module.losses)).abs().max())
        apart = difference(guide, module.objective.guide)
        print(f"{name}: losses differ from those of train by {losses:.3g}, guides by {apart:.3g}")

    more = {"parts": 4, "precision": "bf16-mixed"}
    with tempfile.TemporaryDirectory() as folder:
        halfway = ModelCheckpoint(
            folder, "half", every_n_epochs=steps // 2, save_on_train_epoch_end=True
        )
        saving = {"enable_checkpointing": True, "callbacks": [halfway]}
        whole = by_lightning("IVON", data, steps, **more, **saving)
        resumed = by_lightning("IVON", data, steps, start=f"{folder}/half.ckpt", **more)
    apart = difference(whole.objective.guide, resumed.objective.guide)
    print(f"micro-batches in bfloat16: the guide that went on from half differs by {apart:.3g}")

    predictive = bdl.Predictive(whole.objective.model, whole.objective.guide, num_samples=200)
    f = predictive(data[0])["f"].squeeze(-1)
    error = (f.mean(0) - torch.sin(2 * data[0][:, 0])).square().mean().sqrt()
    print(f"its function is {float(error):.2f} off, and its sd {float(f.std(0).mean()):.2f}")


if __name__ == "__main__":
    main()
