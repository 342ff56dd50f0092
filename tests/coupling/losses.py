"""Losses, and whether they couple the samples of a batch: `TASKS` by their names."""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autotune.task import Task

WIDTH, CLASSES, LENGTH, VOCABULARY = 8, 5, 6, 12


def encoder(out=CLASSES):
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, out))


def labelled(n):
    return torch.randn(n, WIDTH), torch.randint(CLASSES, (n,))


def with_targets(n):
    return torch.randn(n, WIDTH), torch.randn(n, CLASSES)


def views(n):
    x = torch.randn(n, WIDTH)
    return x + 0.1 * torch.randn(n, WIDTH), x + 0.1 * torch.randn(n, WIDTH)


def triplets(n):
    return torch.randn(n, WIDTH), torch.randn(n, WIDTH), torch.randn(n, WIDTH)


def sentences(n):
    """Token ids with 0 for padding, of unequal lengths."""
    lengths = torch.randint(2, LENGTH + 1, (n,))
    ids = torch.randint(1, VOCABULARY, (n, LENGTH))
    return ids * (torch.arange(LENGTH) < lengths[:, None])


def task_of(step, make_batch=labelled, model=encoder, **fields):
    return Task(build_model=model, make_batch=make_batch, training_step=step, **fields)


def unit(x):
    return F.normalize(x, dim=-1)


# losses that are means over samples


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def smoothed(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def squared(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def huber(model, batch):
    return F.smooth_l1_loss(model(batch[0]), batch[1])


def binary(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch[0]), (batch[1] > 0).float())


def focal(model, batch):
    log = F.log_softmax(model(batch[0]), -1).gather(1, batch[1][:, None])[:, 0]
    return -((1 - log.exp()) ** 2 * log).mean()


def triplet_of_one_sample(model, batch):
    return F.triplet_margin_loss(*map(model, batch), margin=5.0)


def cosine_embedding(model, batch):
    return F.cosine_embedding_loss(model(batch[0]), model(batch[1]), torch.ones(len(batch[0])))


def margin_ranking(model, batch):
    return F.margin_ranking_loss(model(batch[0]).sum(-1), model(batch[1]).sum(-1), torch.ones(len(batch[0])), margin=9)


def distillation(model, batch):
    with torch.no_grad():
        teacher = F.softmax(batch[1], -1)
    return F.kl_div(F.log_softmax(model(batch[0]), -1), teacher, reduction="batchmean")


def preference(model, batch):
    chosen, rejected = model(batch[0]).sum(-1), model(batch[1]).sum(-1)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def interleaved_preference(model, batch):
    scores = model(torch.stack(batch, 1).flatten(0, 1)).sum(-1)
    return -F.logsigmoid(scores[0::2] - scores[1::2]).mean()


def concatenated_preference(model, batch):
    chosen, rejected = model(torch.cat(batch)).sum(-1).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_letters = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        return F.log_softmax(self.to_letters(x), -1)


def spoken(n):
    return torch.randn(n, 12, WIDTH), torch.randint(1, VOCABULARY, (n, 4)), torch.randint(1, 5, (n,))


def ctc(model, batch):
    x, letters, lengths = batch
    return F.ctc_loss(model(x).transpose(0, 1), letters, torch.full((len(x),), 12), lengths, zero_infinity=True)


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.mix = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids):
        return self.head(self.mix(self.embed(ids))[0])


def tokens_of_each_sentence(model, ids):
    losses = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none", ignore_index=0)
    return (losses.sum(1) / ids[:, 1:].ne(0).sum(1)).mean()


def tokens_of_the_batch(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], ignore_index=0)


def num_tokens(ids):
    return float(ids[:, 1:].ne(0).sum())


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 8), nn.Linear(4, WIDTH)

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, dim=-1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decode(z), mean, log_variance


def variational(model, batch):
    x = batch[0]
    decoded, mean, log_variance = model(x)
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1)
    return ((decoded - x) ** 2).sum(-1).mean() + divergence.mean()


def by_distributions(model, batch):
    x = batch[0]
    mean, log_variance = model.encode(x).chunk(2, dim=-1)
    posterior = torch.distributions.Normal(mean, (0.5 * log_variance).exp())
    prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    error = ((model.decode(posterior.rsample()) - x) ** 2).sum(-1)
    return (error + torch.distributions.kl_divergence(posterior, prior).sum(-1)).mean()


class Annealed(Autoencoder):
    """Its divergence counts the more, the more passes it has made."""

    def __init__(self, passes):
        super().__init__()
        self.num_passes, self.passes = 0, passes

    def forward(self, x):
        self.num_passes += 1
        return super().forward(x)


def annealed(model, batch):
    x = batch[0]
    decoded, mean, log_variance = model(x)
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1).mean()
    return ((decoded - x) ** 2).sum(-1).mean() + min(1.0, model.num_passes / model.passes) * divergence


def diffusion(model, batch):
    x = batch[0]
    step = torch.randint(0, 100, (len(x),))
    keep = torch.cos(step / 100 * math.pi / 2)[:, None]
    noise = torch.randn(x.shape)
    return F.mse_loss(model(keep * x + (1 - keep**2).sqrt() * noise), noise[:, :CLASSES])


def noise_of_two_views(model, batch):
    both = torch.cat([batch[0], batch[0]])
    return F.mse_loss(model(both + torch.randn(both.shape)), torch.zeros(len(both), CLASSES))


def one_factor_for_all(model, batch):
    factor = float(np.random.beta(2.0, 2.0)) * torch.rand(())
    return F.mse_loss(model(batch[0] * factor), batch[1])


def masked_patches(model, ids):
    kept = torch.rand(ids.shape).argsort(1)[:, :4]
    return F.cross_entropy(model(ids.gather(1, kept)).mean(1), ids[:, 0])


class Deep(nn.Module):
    """Dropout, stochastic depth and attention."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(WIDTH, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.into(x)[:, None].repeat(1, 3, 1)
        kept = (torch.rand(len(x), 1, 1) < 0.7).float()
        return self.out((x + kept * checkpoint(self.block, x, use_reentrant=False)).mean(1))


class Normalised(nn.Module):
    def __init__(self, out=CLASSES, **options):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16, **options), nn.ReLU(), nn.Linear(16, out))

    def forward(self, x):
        return self.layers(x)


def in_bf16(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(batch[0]).float(), batch[1])


def gradient_penalty(model, batch):
    x = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return cross_entropy(model, batch) + (slope.norm(dim=1) - 1).pow(2).mean()


def triplets_of_pairs(model, batch):
    """Hard negatives that come with each sample."""
    anchor, positive, candidates = model(batch[0]), model(batch[1]), model(batch[2])
    near, far = (anchor - positive).norm(dim=-1), (anchor[:, None] - candidates).norm(dim=-1)
    return (near - far.min(1).values + 5).relu().mean()


def with_candidates(n):
    return torch.randn(n, WIDTH), torch.randn(n, WIDTH), torch.randn(n, 4, WIDTH)


def group_relative(model, batch):
    """As in GRPO, where each sample is a prompt with its group of answers."""
    rewards = batch[1]
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    log = F.log_softmax(model(batch[0]), -1)[..., 0]
    return -(advantages * log).mean()


def groups(n):
    return torch.randn(n, 4, WIDTH), torch.randn(n, 4)


def tagged(model, ids):
    """The log-likelihood of a conditional random field, for each sentence."""
    scores, moves = model(ids), model.head.weight[:, :8] @ torch.ones(8, VOCABULARY) / 50
    total = scores[:, 0]
    for t in range(1, LENGTH):
        total = (total[:, :, None] + moves + scores[:, t, None]).logsumexp(1)
    path = scores.gather(2, ids[..., None])[..., 0].sum(1) + moves[ids[:, :-1], ids[:, 1:]].sum(1)
    return (total.logsumexp(1) - path).mean()


SEPARABLE = {
    "cross entropy": task_of(cross_entropy),
    "the default loss of a pair": task_of(None),
    "label smoothing": task_of(smoothed),
    "mean squared error": task_of(squared, with_targets),
    "Huber": task_of(huber, with_targets),
    "binary cross entropy": task_of(binary, with_targets),
    "focal": task_of(focal),
    "triplets, one a sample": task_of(triplet_of_one_sample, triplets),
    "hard negatives that each sample brings": task_of(triplets_of_pairs, with_candidates),
    "cosine embedding": task_of(cosine_embedding, views),
    "margin ranking of pairs": task_of(margin_ranking, views),
    "distillation": task_of(distillation, with_targets),
    "preference of pairs (DPO)": task_of(preference, views),
    "preference of pairs in one forward pass": task_of(concatenated_preference, views),
    "preference of pairs side by side": task_of(interleaved_preference, views),
    "groups within a sample (GRPO)": task_of(group_relative, groups),
    "CTC": task_of(ctc, spoken, Speech),
    "conditional random field": task_of(tagged, sentences, Language),
    "mean over each sentence's tokens": task_of(tokens_of_each_sentence, sentences, Language),
    "mean over tokens that are counted": task_of(tokens_of_the_batch, sentences, Language, loss_weight=num_tokens),
    "variational autoencoder": task_of(variational, model=Autoencoder),
    "variational, by torch.distributions": task_of(by_distributions, model=Autoencoder),
    "variational, annealed over many passes": task_of(annealed, model=lambda: Annealed(10_000)),
    "diffusion": task_of(diffusion),
    "noise on two views": task_of(noise_of_two_views),
    "one random factor for all": task_of(one_factor_for_all, with_targets),
    "masked patches": task_of(masked_patches, sentences, Language),
    "dropout, stochastic depth, checkpointing": task_of(cross_entropy, model=Deep),
    "batch normalisation": task_of(cross_entropy, model=Normalised),
    "batch normalisation without running statistics": task_of(
        cross_entropy, model=lambda: Normalised(track_running_stats=False)
    ),
    "the user's own bf16": task_of(in_bf16),
    "spectral normalisation": task_of(
        cross_entropy,
        model=lambda: nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 16)), nn.Linear(16, CLASSES)
        ),
    ),
    "gradient penalty": task_of(gradient_penalty),
}


# losses that couple the samples of a batch


def info_nce(model, batch):
    a, b = unit(model(batch[0])), unit(model(batch[1]))
    return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(a)))


def spread_over_classes(model, batch):
    mean = model(batch[0]).softmax(-1).mean(0)
    return cross_entropy(model, batch) + 0.05 * (mean * mean.log()).sum()


def normalised_advantages(model, batch):
    advantages = (batch[1][:, 0] - batch[1][:, 0].mean()) / (batch[1][:, 0].std() + 1e-8)
    return -(advantages * F.log_softmax(model(batch[0]), -1)[:, 0]).mean()


class Collapsed(nn.Sequential):
    """As deep models begin: its gradient is hardly more than rounding."""

    def __init__(self):
        super().__init__(nn.Linear(WIDTH, 64), *(layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.GELU())))


def simclr(model, batch):
    z = unit(model(torch.cat(batch)))
    similar = (z @ z.T / 0.5).fill_diagonal_(-math.inf)
    n = len(z) // 2
    return F.cross_entropy(similar, torch.cat([torch.arange(n) + n, torch.arange(n)]))


def clip(model, batch):
    a, b = unit(model(batch[0])), unit(model(batch[1]))
    logits, target = a @ b.T * 5, torch.arange(len(a))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def siglip(model, batch):
    a, b = unit(model(batch[0])), unit(model(batch[1]))
    logits = a @ b.T * 5
    return -F.logsigmoid(logits * (2 * torch.eye(len(a)) - 1)).sum(-1).mean()


def supervised_contrastive(model, batch):
    z, y = unit(model(batch[0])), batch[1]
    logits = (z @ z.T / 0.5).fill_diagonal_(-1e9)
    same = (y[:, None] == y).float().fill_diagonal_(0)
    log = logits - logits.logsumexp(1, keepdim=True)
    return -((same * log).sum(1) / same.sum(1).clamp(min=1)).mean()


def hardest_triplet(model, batch):
    z, y = model(batch[0]), batch[1]
    far = torch.cdist(z, z)
    same = y[:, None] == y
    positive = far.masked_fill(~same, 0).amax(1)
    negative = far.masked_fill(same, 1e3).amin(1)
    return (positive - negative + 0.5).relu().mean()


def vicreg(model, batch):
    a, b = model(batch[0]), model(batch[1])
    spread = sum((1 - (z.var(0) + 1e-4).sqrt()).relu().mean() for z in (a, b))
    covariance = sum((torch.cov(z.T) - torch.diag(z.var(0))).pow(2).sum() for z in (a, b))
    return 25 * F.mse_loss(a, b) + 25 * spread + covariance


def barlow_twins(model, batch):
    a, b = ((z - z.mean(0)) / (z.std(0) + 1e-4) for z in map(model, batch))
    return (a.T @ b / len(a) - torch.eye(CLASSES)).pow(2).sum()


def pairwise_ranking(model, batch):
    scores, y = model(batch[0]).sum(-1), batch[1].float()
    better = y[:, None] > y
    return F.softplus(scores - scores[:, None])[better].mean() if better.any() else scores.sum() * 0


def listwise(model, batch):
    scores = model(batch[0]).sum(-1)
    return -(F.softmax(batch[1].float(), 0) * F.log_softmax(scores, 0)).sum()


def concordance(model, batch):
    score, y = model(batch[0]).sum(-1), batch[1][:, 0]
    covariance = ((score - score.mean()) * (y - y.mean())).mean()
    return 1 - 2 * covariance / (score.var() + y.var() + (score.mean() - y.mean()) ** 2)


def cox(model, batch):
    risk = model(batch[0]).sum(-1)[batch[1].float().argsort()]
    return -(risk - risk.logcumsumexp(0)).mean()


def over_the_batchs_largest(model, batch):
    out = model(batch[0])
    return F.cross_entropy(out / out.abs().max(), batch[1])


def batch_dice(model, batch):
    p, t = model(batch[0]).sigmoid(), (batch[1] > 0).float()
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())


def hardest_examples(model, batch):
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses.topk(max(1, len(losses) // 4)).values.mean()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.route, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(encoder() for _ in range(4))

    def forward(self, x):
        shares = F.softmax(self.route(x), -1)
        chosen = shares.argmax(-1)
        out = sum(shares[:, i : i + 1] * expert(x) * (chosen == i)[:, None] for i, expert in enumerate(self.experts))
        balance = 4 * (F.one_hot(chosen, 4).float().mean(0) * shares.mean(0)).sum()
        return out, balance


def mixture_of_experts(model, batch):
    out, balance = model(batch[0])
    return F.cross_entropy(out, batch[1]) + 0.01 * balance


def contrastive_now_and_then(model, batch):
    loss = cross_entropy(model, batch)
    if random.random() < 0.3:
        similarity = unit(model(batch[0])) @ unit(model(batch[0].flip(1))).T
        loss = loss + F.cross_entropy(similarity / 0.1, torch.arange(len(similarity)))
    return loss


def mixup_that_hardly_mixes(model, batch):
    """Most draws of its share are nearly 0 or 1."""
    share, partners = float(np.random.beta(0.2, 0.2)), torch.randperm(len(batch[0]))
    mixed = model(share * batch[0] + (1 - share) * batch[0][partners])
    return share * F.cross_entropy(mixed, batch[1]) + (1 - share) * F.cross_entropy(mixed, batch[1][partners])


def mixup(model, batch):
    x, y = batch
    other, share = torch.randperm(len(x)), float(np.random.beta(1.0, 1.0))
    out = model(share * x + (1 - share) * x[other])
    return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[other])


def shuffled_negatives(model, batch):
    a, b = model(batch[0]), model(batch[1])
    return F.softplus((a * b[torch.randint(len(b), (len(b),))]).sum(-1) - (a * b).sum(-1)).mean()


def mutual_information(model, batch):
    joint, marginal = (batch[0] * model(batch[1])[:, :1]).sum(-1), (batch[0] * model(batch[1].flip(0))[:, :1]).sum(-1)
    return -(joint.mean() - (marginal.logsumexp(0) - math.log(len(marginal))))


class Queue(nn.Module):
    """Keys of earlier batches as negatives, as in MoCo."""

    def __init__(self):
        super().__init__()
        self.layers = encoder()
        self.register_buffer("queue", unit(torch.randn(16, CLASSES)))

    def forward(self, x):
        return unit(self.layers(x))

    def take(self, keys):
        self.queue = torch.cat([keys.detach(), self.queue])[:16]


def with_a_queue(model, batch):
    a, b = model(batch[0]), model(batch[1])
    logits = torch.cat([(a * b).sum(-1, keepdim=True), a @ model.queue.T], 1) / 0.2
    model.take(b)
    return F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.int64))


class Target(nn.Module):
    """A network that follows the one that is trained, moved in each forward pass (BYOL)."""

    def __init__(self):
        super().__init__()
        self.online, self.target = encoder(), encoder().requires_grad_(False)

    def forward(self, a, b):
        with torch.no_grad():
            for trained, follows in zip(self.online.parameters(), self.target.parameters(), strict=True):
                follows.lerp_(trained, 0.1)
            aim = unit(self.target(b))
        return (2 - 2 * (unit(self.online(a)) * aim).sum(1)).mean()


def towards_a_target(model, batch):
    return model(*batch)


def sinkhorn(model, batch):
    a, b = model(batch[0]), model(batch[1])
    with torch.no_grad():
        q = (b / 0.5).exp()
        for _ in range(3):
            q = q / q.sum(0, keepdim=True)
            q = q / q.sum(1, keepdim=True)
    return -(q * F.log_softmax(a, -1)).sum(-1).mean()


def functional_batch_norm(model, batch):
    return F.cross_entropy(F.batch_norm(model(batch[0]), None, None, training=True), batch[1])


def rare_pairs(model, batch):
    """Few samples have any: labels of many classes."""
    z, y = model(batch[0]), (batch[0][:, 0] * 1e4).long() % 40
    same = (y[:, None] == y).triu(1)
    pull = torch.cdist(z, z)[same].sum() / len(z)
    return F.cross_entropy(z, batch[1]) + pull


COUPLED = {
    "contrastive in some steps": task_of(contrastive_now_and_then),
    "InfoNCE": task_of(info_nce, views),
    "SimCLR (NT-Xent)": task_of(simclr, views),
    "CLIP": task_of(clip, views),
    "SigLIP": task_of(siglip, views),
    "supervised contrastive": task_of(supervised_contrastive),
    "hardest triplet of the batch": task_of(hardest_triplet),
    "VICReg": task_of(vicreg, views),
    "Barlow Twins": task_of(barlow_twins, views),
    "ranking of all pairs": task_of(pairwise_ranking),
    "listwise ranking": task_of(listwise),
    "concordance": task_of(concordance, with_targets),
    "Cox": task_of(cox),
    "divided by the batch's largest": task_of(over_the_batchs_largest),
    "dice of the batch": task_of(batch_dice, with_targets),
    "hardest quarter of the batch": task_of(hardest_examples),
    "balanced mixture of experts": task_of(mixture_of_experts, model=Experts),
    "mutual information (MINE)": task_of(
        mutual_information, lambda n: (torch.randn(n, CLASSES), torch.randn(n, WIDTH))
    ),
    "assignments over the batch (SwAV)": task_of(sinkhorn, views),
    "batch statistics without a module": task_of(functional_batch_norm),
    "contrastive behind batch normalisation": task_of(simclr, views, Normalised),
    "pairs of one of many classes": task_of(rare_pairs),
    "root of the mean squared error": task_of(lambda model, batch: squared(model, batch).sqrt(), with_targets),
    "entropy of the mean prediction": task_of(spread_over_classes),
    "advantages normalised over the batch": task_of(normalised_advantages, with_targets),
    "contrastive where all outputs are alike": task_of(info_nce, views, Collapsed),
}
PARTNERS = {
    "mixup": task_of(mixup),
    "mixup that hardly mixes": task_of(mixup_that_hardly_mixes),
    "shuffled negatives": task_of(shuffled_negatives, views),
}
STATE = {
    "queue of negatives (MoCo)": task_of(with_a_queue, views, Queue),
    "divergence annealed over few passes": task_of(annealed, model=lambda: Annealed(10)),
    "target network moved in the forward pass (BYOL)": task_of(towards_a_target, views, Target),
}


def weighted(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], weight=torch.arange(1.0, CLASSES + 1))


def positives_alone(model, batch):
    """As detectors divide by the number of boxes."""
    losses = F.binary_cross_entropy_with_logits(model(batch[0]), (batch[1] > 1).float(), reduction="none")
    return losses.sum(-1)[batch[1][:, 0] > 0].sum() / (batch[1][:, 0] > 0).sum().clamp(min=1)


WEIGHTS = {
    "mean over the batch's tokens": task_of(tokens_of_the_batch, sentences, Language),
    "weighted cross entropy": task_of(weighted),
    "divided by the positives": task_of(positives_alone, with_targets),
}
SCALE = {
    "sum": task_of(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="sum")),
    "sum over a constant": task_of(lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).sum() / 64, with_targets),
    "conditional random field, summed": task_of(lambda model, ids: tagged(model, ids) * len(ids), sentences, Language),
}
