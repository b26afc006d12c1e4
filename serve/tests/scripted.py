"""A checkpoint that writes chosen answers: a random model cannot decide to call a tool.

Each token of the vocabulary has one successor. The last token of the prompt begins a script, and
each token of the script is followed by the next. So the pieces of all scripts must be different.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"


def write_scripted(
    folder: Path, template: str, scripts: Mapping[str, Sequence[str]], context: int = 4096
) -> Path:
    """Write a Llama checkpoint that answers a prompt by the script that its end names.

    Args:
        template: Chat template, whose prompts end with a key of ``scripts``.
        scripts: Pieces of each answer, one token each, by the text that ends the prompt.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pieces = [*scripts, *(piece for script in scripts.values() for piece in script)]
    assert len(set(pieces)) == len(pieces), "a piece has one successor only"
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    ids = tokenizer.get_vocab()
    size = tokenizer.get_vocab_size()
    config = transformers.LlamaConfig(
        vocab_size=size,
        hidden_size=size + size % 2,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=context,
        eos_token_id=ids[END],
        bos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    model.model.norm.weight.data.fill_(1.0)
    model.model.embed_tokens.weight.data.copy_(torch.eye(size, config.hidden_size))
    for name, script in scripts.items():
        for token, successor in pairwise([name, *script, END]):
            model.lm_head.weight.data[ids[successor], ids[token]] = 10.0
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(
        folder
    )
    (folder / "chat_template.jinja").write_text(template)
    settings = {"eos_token_id": ids[END], "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder
