"""Kernels of GLM-5: one folder an op, one public function an op.

An op takes `implementation=`: None for the platform's own, or one of the names
in `pallas_kernels.dispatch`.
"""

from pallas_kernels.flash_attention.api import flash_attention
from pallas_kernels.grouped_matmul.api import grouped_matmul

__all__ = ['flash_attention', 'grouped_matmul']
