"""Text files to Megatron's indexed dataset (``PREFIX.bin`` and ``PREFIX.idx``).

``python -m megatron_memo.data`` or ``scripts/prepare_data.py``; see ``cli.py`` for the flags.

=============  =====================================================================
``sources``    which files are read, in which order
``parts``      the work cut into parts, and the pieces of text in one part
``tokenizer``  bytes, or any tokenizer that Megatron knows, behind one small class
``options``    what decides the bytes of the result
``preflight``  refusals before any work is done
``workdir``    parts on disk: what makes a run restartable and its output the same
``pack``       pieces joined into documents
``record``     what a dataset was made from, and what is in it
``build``      all of it: tokenize in parallel, join, publish by rename
``upstream``   Megatron's own dataset code, imported late and without noise
``cli``        flags, messages, exit status
=============  =====================================================================

Nothing here needs a GPU or the CPU platform: Megatron's dataset files and tokenizers import
without either.
"""
