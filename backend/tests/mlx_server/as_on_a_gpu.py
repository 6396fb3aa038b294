"""Programs of workers that run steps as on a GPU, by kernels that any device has: `host` stands for
`workers.host`, and `rank` for `workers.rank`. A step is queued before the last one's tokens are
read.

    python -m as_on_a_gpu host|rank ...
"""

from __future__ import annotations
