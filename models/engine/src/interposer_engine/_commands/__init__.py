"""The subcommands of ``interposer`` that run or rewrite a model, or manage downloaded ones."""
