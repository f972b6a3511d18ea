"""Open-RS: 7,000 problems that CW-GRPO trains on (Hub: knoveleng/open-rs), tested on MATH-500."""

from dataclasses import replace

from gcpo.tasks import math
from gcpo.tasks.reading import Source, reader

# Its records have a solution too, not always with a box, and a level, "Easy" or "Hard".
SPLITS = {"train": Source(math.answered, "open_rs", "train", "knoveleng/open-rs"), "test": math.SPLITS["test"]}
TASK = replace(math.TASK, name="open_rs", load=reader(SPLITS))
