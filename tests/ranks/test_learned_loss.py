"""The loss of conversations: packed rows as single ones, and one mean over all ranks and micro-batches."""

import copy

import numpy as np
import pytest
import torch
from tests.tiny_models import CONFIGS

from penstock.data import Loader
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.train.step import loss_sum, micro_batches

FIELDS = ("input_ids", "labels", "cu_seqlens", "position_ids")
LENGTH = 48
