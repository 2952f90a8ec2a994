"""Everything that touches Megatron-Core: platform, model, weights, schedule, optimizer, checkpoint.

Importing this package prepares the platform (see ``platform``): nothing else in the project may
import ``megatron.core`` before it.
"""

from megatron_tim.megatron import platform as platform

platform.prepare()
