"""Open-RS: 7,000 problems that CW-GRPO trains on (Hub: knoveleng/open-rs), tested on MATH-500."""

from gcpo.tasks import math
from gcpo.tasks.base import math_task
from gcpo.tasks.reading import Source, reader

# Its records have a solution too, not always with a box, and a level, "Easy" or "Hard".
SPLITS = {"train": Source(math.answered, "open_rs", "train", "knoveleng/open-rs"), "test": math.SPLITS["test"]}
TASK = math_task("open_rs", reader(SPLITS))
