"""Convert a model directory to GGUF as llama.cpp converts it, without a vocabulary.

    python benchmarks/gguf_conversion.py SOURCE_TREE MODEL_DIR TARGET.gguf

SOURCE_TREE is llama.cpp's, whose converter and names of tensors are used. Its list of vocabularies
has none of random models, which need none: whoever measures speed reads no text.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def main() -> None:
    tree, model, target = sys.argv[1:]
    # The converter comes with a gguf of its own version.
    sys.path[:0] = [tree, f"{tree}/gguf-py"]
    program: Any = importlib.import_module("convert_hf_to_gguf")
    model_class = program.get_model_class

    def without_extras(*names: Any, **options: Any) -> Any:
        """Return the class of an architecture, of whose models none predicts further tokens."""
        kind = model_class(*names, **options)
        kind.set_vocab, kind.no_mtp = without_vocabulary, True
        return kind

    program.get_model_class = without_extras
    sys.argv = ["convert", model, "--outfile", target, "--outtype", "bf16"]
    program.main()


def without_vocabulary(conversion: Any) -> None:
    conversion.gguf_writer.add_tokenizer_model("no_vocab")
    conversion.gguf_writer.add_vocab_size(conversion.hparams["vocab_size"])


if __name__ == "__main__":
    main()
