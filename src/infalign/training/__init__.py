"""Training: the loops come from TRL and transformers; infalign supplies the loss or the reward."""

import os

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # otherwise TRL sends usage reports
