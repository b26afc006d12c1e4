"""Tiny random models of the architectures of transformers, adapted: the table of them, and a sample.

The judge is tried with adapters that are wrong, so that it is known to notice.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.forks import forks
from torch import nn

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
TABLE = BENCHMARKS / "results" / "adapt_coverage.txt"
# One of every kind: decoders with each kind of norm, position and cache; mixtures; hybrids and
# state-space models; encoders; encoder-decoders; convolutions; vision, speech, several at once.
SAMPLE = {
    "decoders": "bloom falcon gemma3_text glm4 gpt2 gpt_neox gptj llama olmo2 opt phi qwen3",
    "mixtures": "deepseek_v3 gpt_oss mixtral qwen3_moe",
    "hybrids": "falcon_h1 jamba lfm2 mamba2 qwen3_next rwkv",
    "encoders": "albert bert deberta-v2 layoutlmv3 modernbert",
    "encoder-decoders": "bart t5",
    "vision": "convnext detr_like swin vit",
    "speech": "wav2vec2 whisper",
    "several": "clip llava paligemma qwen2_5_vl",
    "others": "patchtst xlnet",
}
