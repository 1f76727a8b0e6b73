"""Linear attention with a decay, chunk by chunk over a state (as gated linear attention, RetNet and Mamba-2 are
computed), keys and values made of a latent. Products within a chunk look like scores, and no softmax or other function
of each score is taken: attention of another kind, of which nothing is said."""

import torch

from tests.zoo.base import NoAttention, Usual, carried

EXPECTED = NoAttention()
CHUNK = 2


class Attention(Usual):
    def attend(self, q, k, v):
        S, T = q.shape[2], k.shape[2]
        age = torch.arange(T - 1, -1, -1, dtype=k.dtype)
        decay, state, rows = 0.9**age, k.new_zeros(*k.shape[:2], k.shape[3], v.shape[3]), []
        for start in range(0, T, CHUNK):
            at = slice(start, start + CHUNK)
            own, given, keys = q[:, :, max(start - T + S, 0) : max(start + CHUNK - T + S, 0)], decay[at], k[:, :, at]
            if own.shape[2]:
                mine = given[-own.shape[2] :]
                within = (own @ keys.mT) * torch.tril(given / mine[:, None], given.shape[0] - mine.shape[0])
                rows.append(within @ v[:, :, at] + (own / mine[:, None]) @ state)
            state = state + (keys * given[:, None]).mT @ v[:, :, at]
        return torch.cat(rows, 2)


build = Attention
session = carried
