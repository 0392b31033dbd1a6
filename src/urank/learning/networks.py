"""Parts of all networks: the layer for raw features, and the backbones behind it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from urank.errors import ConfigError
from urank.learning.features import Featurizer
from urank.learning.training_settings import Backbone

EMBEDDING = 8
"""Width of the embeddings of DeepFM, PNN and PIN."""

SUBNETWORK = 2
"""Width of the sub-networks of PIN."""


def chunk_rows(device: torch.device) -> int:
    """Return the number of rows to predict at once.

    On a CPU the activations must fit in the cache of a core, and be small enough not to be allocated from the kernel
    for each layer: with 30 features, 4,096 rows at a time take 0.5 µs a row, 65,536 take 1.8.
    """
    return 4_096 if device.type == "cpu" else 65_536


def embedding_width(cardinality: int) -> int:
    """Choose the width of an embedding, growing slowly with the cardinality from 2 to 32.

    >>> [embedding_width(n) for n in (2, 10, 1000, 10**6)]
    [2, 3, 11, 32]
    """
    return max(2, min(32, round(1.6 * cardinality**0.28) if cardinality < 50_000 else 32))


class FeatureLayer(nn.Module):
    """Standardise raw numbers, z = (signed log of x − mean) / std, and add missing-value indicators.

    A missing number becomes 0, the mean; features that were ever missing in training get a further input that indicates
    it. Standardised values are clipped to ±8, which bounds the effect of numbers far outside the training data.
    """

    mean: Tensor
    std: Tensor
    indicated: Tensor

    def __init__(self, featurizer: Featurizer) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([f.mean for f in featurizer.inputs], dtype=torch.float32))
        self.register_buffer("std", torch.tensor([f.std for f in featurizer.inputs], dtype=torch.float32))
        indicated = [place for place, f in enumerate(featurizer.inputs) if f.missing]
        self.register_buffer("indicated", torch.tensor(indicated, dtype=torch.int64))
        self.width = len(featurizer.inputs) + len(indicated)

    def forward(self, numeric: Tensor) -> Tensor:
        scaled = torch.abs(numeric)  # the only array that is made; the rest is in place
        scaled.log1p_().copysign_(numeric).sub_(self.mean).div_(self.std).clamp_(-8.0, 8.0).nan_to_num_(0.0)
        if len(self.indicated) == 0:
            return scaled
        return torch.cat([scaled, torch.isnan(numeric[:, self.indicated]).to(scaled.dtype)], dim=1)


class Perceptron(nn.Module):
    """Concatenated features and embeddings, followed by hidden layers; the last field may be one-hot instead."""

    def __init__(
        self, featurizer: Featurizer, hidden: Sequence[int], dropout: float, *, one_hot_last: bool = False
    ) -> None:
        super().__init__()
        embedded = featurizer.cardinalities[:-1] if one_hot_last else featurizer.cardinalities
        self.one_hot = featurizer.cardinalities[-1] - 1 if one_hot_last else 0
        self.features = FeatureLayer(featurizer)
        self.embeddings = nn.ModuleList(nn.Embedding(n, embedding_width(n)) for n in embedded)
        width = self.features.width + sum(map(embedding_width, embedded)) + self.one_hot
        self.layers = hidden_layers(width, hidden, dropout)
        self.width = hidden[-1] if hidden else width

    def forward(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        made = self._concatenated(numeric, categorical)
        if self.one_hot:
            made = torch.cat([made, torch.eye(self.one_hot).to(made)[categorical[:, -1] - 1]], dim=1)
        result: Tensor = self.layers(made)
        return result

    def for_each_last(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        """Compute `forward` with each of the N categories of the one-hot field in turn, `[rows, N, width]`.

        `categorical` has no column for that field, whose categories each add a column of the first hidden layer.
        """
        weight, bias = self.layers[0].parameters()
        before = weight.shape[1] - self.one_hot
        shared = linear(self._concatenated(numeric, categorical), weight[:, :before], bias)
        result: Tensor = self.layers[1:](shared[:, None] + weight[:, before:].T)
        return result

    def _concatenated(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        parts = [self.features(numeric)]
        parts += [embedding(categorical[:, place]) for place, embedding in enumerate(self.embeddings)]
        return torch.cat(parts, dim=1)


class FieldNetwork(nn.Module):
    """Shared part of DeepFM, PNN and PIN: each field has an embedding v of `EMBEDDING` numbers, and `layers` read them.

    An embedding is a table row for a category, a vector times the scaled value for a number.
    """

    def __init__(self, featurizer: Featurizer, hidden: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.features = FeatureLayer(featurizer)
        self.directions = nn.Parameter(torch.randn(self.features.width, EMBEDDING) * 0.1)
        self.embeddings = nn.ModuleList(nn.Embedding(n, EMBEDDING) for n in featurizer.cardinalities)
        self.add_wide(featurizer)
        for table in self.embeddings.parameters():
            nn.init.normal_(table, std=0.1)
        self.n_fields = self.features.width + len(featurizer.categorical)
        self.layers = hidden_layers(self.input_width, hidden, dropout)

    @property
    def input_width(self) -> int:
        """The number of inputs of the hidden layers."""
        return self.n_fields * EMBEDDING

    def add_wide(self, featurizer: Featurizer) -> None:
        """Add a weight for each field, if the network has a wide part."""

    def embed(self, scaled: Tensor, categorical: Tensor) -> Tensor:
        """Compute the embeddings `[rows, fields, width]` of scaled numbers and of the columns of codes passed."""
        fields = scaled[:, :, None] * self.directions
        codes = [self.embeddings[place](categorical[:, place])[:, None] for place in range(categorical.shape[1])]
        return torch.cat([fields, *codes], dim=1)


class DeepFM(FieldNetwork):
    """DeepFM (Guo et al. 2017): wide part, factorisation machine and hidden layers over the same fields.

    The output is the last hidden layer, ½((Σv)² − Σv²) in every dimension of the embeddings, and the wide sum.
    """

    def __init__(self, featurizer: Featurizer, hidden: Sequence[int], dropout: float) -> None:
        super().__init__(featurizer, hidden, dropout)
        self.width = (hidden[-1] if hidden else self.n_fields * EMBEDDING) + EMBEDDING + 1

    def add_wide(self, featurizer: Featurizer) -> None:
        self.wide = nn.Parameter(torch.zeros(self.features.width, 1))
        self.wide_categories = nn.ModuleList(nn.Embedding(n, 1) for n in featurizer.cardinalities)
        for table in self.wide_categories.parameters():
            nn.init.zeros_(table)

    def forward(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        fields, wide = self._fields(numeric, categorical)
        return torch.cat([self.layers(fields.flatten(1)), pairwise(fields), wide], dim=1)

    def for_each_last(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        """Compute `forward` with each of the N known categories of the last field in turn, `[rows, N, width]`.

        `categorical` has no column for that field. Everything independent of it is computed once: a category with
        embedding u adds its columns of the first hidden layer (at least one is required), u ∘ Σv to the pairs, and its
        weight to the wide sum.
        """
        fields, wide = self._fields(numeric, categorical)
        (last,), (last_wide,) = self.embeddings[-1].parameters(), self.wide_categories[-1].parameters()
        weight, bias = self.layers[0].parameters()
        known, before = last[1:], weight.shape[1] - last.shape[1]
        first = linear(fields.flatten(1), weight[:, :before], bias)[:, None] + linear(known, weight[:, before:])
        pairs = pairwise(fields)[:, None] + fields.sum(dim=1)[:, None] * known
        return torch.cat([self.layers[1:](first), pairs, wide[:, None] + last_wide[1:]], dim=2)

    def _fields(self, numeric: Tensor, categorical: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the embeddings v `[rows, fields, width]` and the wide sum `[rows, 1]` of the columns passed."""
        scaled = self.features(numeric)
        wide = scaled @ self.wide
        for place in range(categorical.shape[1]):
            wide = wide + self.wide_categories[place](categorical[:, place])
        return self.embed(scaled, categorical), wide


class ProductNetwork(FieldNetwork):
    """PNN with inner products (Qu et al. 2016): the first hidden layer also reads the products of all pairs of fields.

        first_n = ReLU(W_n · (v_1 … v_f) + b_n + Σ_i Σ_j θ_ni θ_nj ⟨v_i, v_j⟩)

    The weights of the pairs have rank 1, so that the double sum is |Σ_i θ_ni v_i|². A hidden layer is required.
    """

    def __init__(self, featurizer: Featurizer, hidden: Sequence[int], dropout: float) -> None:
        if not hidden:
            raise ConfigError("hidden must have at least one layer for the backbone pnn, which adds products to it")
        super().__init__(featurizer, hidden, dropout)
        self.theta = nn.Parameter(torch.randn(hidden[0], self.n_fields) * self.n_fields**-0.5)
        self.width = hidden[-1]

    def forward(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        fields = self.embed(self.features(numeric), categorical)
        products = (torch.einsum("rfw,nf->rnw", fields, self.theta) ** 2).sum(dim=2)
        result: Tensor = self.layers[1:](self.layers[0](fields.flatten(1)) + products)
        return result

    def for_each_last(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        """Compute `forward` with each of the N known categories of the last field in turn, `[rows, N, width]`.

        As in `DeepFM`; a category u adds 2 θ_n ⟨u, Σθv⟩ + θ_n² |u|² to the products.
        """
        fields = self.embed(self.features(numeric), categorical)
        (last,), (weight, bias) = self.embeddings[-1].parameters(), self.layers[0].parameters()
        known, before = last[1:], weight.shape[1] - last.shape[1]
        summed = torch.einsum("rfw,nf->rnw", fields, self.theta[:, :-1])
        crossed = 2 * torch.einsum("rnw,kw->rkn", summed, known) * self.theta[:, -1]
        own = (known**2).sum(dim=1, keepdim=True) * self.theta[:, -1] ** 2 + linear(known, weight[:, before:])
        shared = linear(fields.flatten(1), weight[:, :before], bias) + (summed**2).sum(dim=2)
        result: Tensor = self.layers[1:]((shared[:, None] + crossed + own).contiguous())
        return result


class ProductNetworkInNetwork(FieldNetwork):
    """PIN (Qu et al. 2018): each pair of fields has a sub-network, and the hidden layers read all of their outputs.

        s_ij = ReLU(W_ij (v_i, v_j, v_i ∘ v_j) + b_ij),      i < j

    A sub-network has one layer of `SUBNETWORK` units. A hidden layer and two fields are required.
    """

    left: Tensor
    right: Tensor

    def __init__(self, featurizer: Featurizer, hidden: Sequence[int], dropout: float) -> None:
        if not hidden:
            raise ConfigError("hidden must have at least one layer for the backbone pin, which reads pairs of fields")
        super().__init__(featurizer, hidden, dropout)
        if self.n_fields < 2:
            raise ConfigError("the backbone pin reads pairs of fields and needs at least two features; got 1")
        numbers = self.features.width
        right, left = torch.tril_indices(numbers, numbers, -1)
        self.register_buffer("left", left, persistent=False)
        self.register_buffer("right", right, persistent=False)
        pairs, inputs = self.n_fields * (self.n_fields - 1) // 2, 3 * EMBEDDING
        self.weight = nn.Parameter(torch.randn(pairs, inputs, SUBNETWORK) * (2 / inputs) ** 0.5)
        self.bias = nn.Parameter(torch.zeros(pairs, SUBNETWORK))
        self.width = hidden[-1]

    @property
    def input_width(self) -> int:
        return self.n_fields * (self.n_fields - 1) // 2 * SUBNETWORK

    def forward(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        scaled = self.features(numeric)
        result: Tensor = self.layers(self._subnetworks(scaled, self.embed(scaled, categorical)))
        return result

    def for_each_last(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        """Compute `forward` with each of the N known categories of the last field in turn, `[rows, N, width]`.

        As in `DeepFM`: the sub-networks of the other pairs are computed once.
        """
        scaled = self.features(numeric)
        fields = self.embed(scaled, categorical)
        (weight, bias), others = self.layers[0].parameters(), fields.shape[1]
        of_field, by_category, of_products = self.last_pairs()
        alone = torch.einsum("rfw,fws->rfs", fields, of_field)[:, None]
        pairs = torch.relu(alone + by_category + torch.einsum("rfw,kfws->rkfs", fields, of_products)).flatten(2)
        before = weight.shape[1] - others * SUBNETWORK
        shared = linear(self._subnetworks(scaled, fields), weight[:, :before], bias)
        result: Tensor = self.layers[1:](shared[:, None] + linear(pairs, weight[:, before:]))
        return result

    def number_pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return a, b and c `[pairs, SUBNETWORK]` of the pairs of numbers x and y: s = ReLU(a x + b y + c x y + bias).

        Their embeddings are multiples of the directions, so that the weights of both can be multiplied beforehand.
        """
        one, other = self.directions[self.left], self.directions[self.right]
        weights = self.weight[: len(self.left)].reshape(-1, 3, EMBEDDING, SUBNETWORK).unbind(1)
        a, b, c = (
            torch.einsum("pw,pws->ps", each, weight)
            for each, weight in zip((one, other, one * other), weights, strict=True)
        )
        return a, b, c

    def last_pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights of the pairs of each field f with the last one, for each of its N known categories k.

        Of the field `[f, width, s]`; what the category adds `[N, f, s]`, with the bias; of products `[N, f, width, s]`.
        """
        (last,), others = self.embeddings[-1].parameters(), self.n_fields - 1
        of_field, of_last, of_product = self.weight[-others:].reshape(-1, 3, EMBEDDING, SUBNETWORK).unbind(1)
        by_category = torch.einsum("kw,fws->kfs", last[1:], of_last) + self.bias[-others:]
        return of_field, by_category, torch.einsum("kw,fws->kfws", last[1:], of_product)

    def _subnetworks(self, scaled: Tensor, fields: Tensor) -> Tensor:
        """Compute s of all pairs `[rows, pairs · SUBNETWORK]` of numbers and of fields `[rows, fields, width]`."""
        numbers, start = scaled.shape[1], len(self.left)
        (a, b, c), x, y = self.number_pairs(), scaled[:, self.left, None], scaled[:, self.right, None]
        parts = [x * (a + y * c) + y * b + self.bias[:start]]
        for place in range(numbers, fields.shape[1]):
            others, own = fields[:, :place], fields[:, place : place + 1].expand(-1, place, -1)
            inputs = torch.cat([others, own, others * own], dim=2)
            pairs = slice(start, start + place)
            parts.append(torch.einsum("rpi,pis->rps", inputs, self.weight[pairs]) + self.bias[pairs])
            start += place
        return torch.relu(torch.cat(parts, dim=1).flatten(1))


def pairwise(fields: Tensor) -> Tensor:
    """Compute Σ v ∘ w over all pairs of fields `[rows, width]`, from `[rows, fields, width]`, as ½((Σv)² − Σv²).

    >>> pairwise(torch.tensor([[[2.0], [3.0], [5.0]]])).item() == 2 * 3 + 2 * 5 + 3 * 5
    True
    """
    return 0.5 * (fields.sum(dim=1) ** 2 - (fields**2).sum(dim=1))


def hidden_layers(width: int, hidden: Sequence[int], dropout: float) -> nn.Sequential:
    """Build linear layers, each followed by ReLU and dropout."""
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU(), nn.Dropout(dropout)]
        width = size
    return nn.Sequential(*layers)


BackboneNetwork = Perceptron | DeepFM | ProductNetwork | ProductNetworkInNetwork

_OF_FIELDS: dict[Backbone, type[DeepFM | ProductNetwork | ProductNetworkInNetwork]] = {
    "deepfm": DeepFM,
    "pnn": ProductNetwork,
    "pin": ProductNetworkInNetwork,
}


def build_backbone(
    kind: Backbone, features: Featurizer, hidden: Sequence[int], dropout: float, *, one_hot_last: bool = False
) -> BackboneNetwork:
    """Build a backbone, `forward(numeric[rows, F], categorical[rows, C]) -> [rows, width]`.

    With `one_hot_last` a perceptron reads the last field as one-hot; the others embed it like any field.
    """
    if kind == "mlp":
        return Perceptron(features, hidden, dropout, one_hot_last=one_hot_last)
    return _OF_FIELDS[kind](features, hidden, dropout)
