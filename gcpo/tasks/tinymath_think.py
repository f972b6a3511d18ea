"""tinymath for policies that write their steps inside <think> ... </think> (EGPO's thinking and answer entropies)."""

from dataclasses import replace

from gcpo.tasks import tinymath

TASK = replace(tinymath.TASK, name="tinymath_think")
