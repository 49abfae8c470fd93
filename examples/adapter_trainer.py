"""A posterior over LoRA adapters, fitted where Hugging Face's Trainer ends.

    python examples/adapter_trainer.py --posterior laplace

Copy this file and change ``network`` and ``Words``. ``PosteriorCallback`` is the whole adapter:
after the Trainer's last step it puts a posterior around the weights that were trained, those of
peft's adapters and the new head. The network here is a tiny BERT with random weights, made from its
configuration, so that nothing is downloaded; the texts are sequences of words, of class 1 where
most are from the upper half of the vocabulary.
Needs: pip install transformers accelerate peft
"""

import argparse
import tempfile

import peft
import torch
import transformers
from torch.utils.data import DataLoader, Dataset

import pyro_bdl as bdl

VOCABULARY, CLASSES, LENGTH = 8, 2, 6


class PosteriorCallback(transformers.TrainerCallback):
    """A posterior over the trained weights, at the end of training: ``posterior`` and ``model``.

    :param dataset: the training data, items with ``labels`` and the network's inputs.
    :param kind: "laplace" around the trained weights, or "mean-field", trained from them by IVON.
    :param prior: of the trained weights.
    :param steps: of IVON.
    """

    def __init__(self, dataset, kind="laplace", prior=None, steps=300):
        self.dataset, self.kind, self.steps = dataset, kind, steps
        self.prior = bdl.priors.Normal(1.0) if prior is None else prior
        self.model = self.posterior = None

    def on_train_end(self, args, state, control, model=None, **kwargs):
        net = bdl.bayesianize(model.eval(), self.prior)  # frozen parameters stay as they are
        self.model = bdl.models.Classification(net, num_data=len(self.dataset))
        if self.kind == "laplace":
            guide = bdl.guides.AutoLaplaceGGN(self.model, structure="kron")
            self.posterior = guide.laplace_approximation(lambda: batches(self.dataset))
            return
        whole = next(batches(self.dataset, len(self.dataset)))
        guide = bdl.guides.AutoMeanField(self.model, init_scale=0.02).prototype(*whole)
        bdl.training.train(
            self.model, guide, *whole, steps=self.steps, optimizer=bdl.optim.IVON(guide),
            batch_size=args.train_batch_size,
        )  # fmt: skip
        self.posterior = guide


def batches(dataset, size=32):
    """Batches (inputs, labels) of a data set."""
    for batch in DataLoader(dataset, batch_size=size):
        labels = batch.pop("labels")
        yield batch, labels


class Words(Dataset):
    """Sequences of words, of class 1 if there are more in the upper half of the vocabulary."""

    def __init__(self, rows, seed):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator)
        self.labels = ((self.ids > VOCABULARY // 2).sum(1) * 2 > LENGTH).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, row):
        return {"input_ids": self.ids[row], "labels": self.labels[row]}


def network():
    """A tiny BERT with adapters: of the weights only these and the head are trained."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, num_labels=CLASSES, hidden_size=16, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=32, max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    net = transformers.BertForSequenceClassification(config)
    adapters = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules=["query", "value", "dense"]
    )
    return peft.get_peft_model(net, adapters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--posterior", choices=["laplace", "mean-field"], default="laplace")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300, help="of the mean-field posterior")
    options = parser.parse_args()

    transformers.set_seed(0)
    train, test = Words(options.rows, 0), Words(200, 1)
    callback = PosteriorCallback(train, options.posterior, steps=options.steps)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, num_train_epochs=options.epochs, per_device_train_batch_size=32,
            learning_rate=1e-2, save_strategy="no", report_to="none", disable_tqdm=True,
            use_cpu=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=network(), args=arguments, train_dataset=train, callbacks=[callback]
        )
        trainer.train()

    posterior, model = callback.posterior, callback.model
    sites = posterior.median()
    size = sum(value.numel() for value in sites.values())
    print(f"{options.posterior} over {size} weights of {len(sites)} tensors")
    ids, labels = next(batches(test, len(test)))
    with torch.no_grad():
        point = trainer.model.eval()(**ids).logits.softmax(-1)
    if options.posterior == "laplace":
        probabilities = bdl.LinearizedPredictive(model, posterior).probabilities(ids)["y"]
    else:
        probabilities = bdl.Predictive(model, posterior, num_samples=100).mean(ids)["y"].mean(0)
    for name, p in {"point": point, "posterior": probabilities}.items():
        truth = p[torch.arange(len(p)), labels]
        accuracy = (p.argmax(-1) == labels).double().mean()
        print(f"{name}: accuracy {accuracy:.2f}, log likelihood {truth.log().mean():.3f}")


if __name__ == "__main__":
    main()
