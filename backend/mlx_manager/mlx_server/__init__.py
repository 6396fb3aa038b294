import os

# Without it transformers says on stderr that PyTorch is missing; nothing here wants PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
