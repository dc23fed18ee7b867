"""Writes the error file itself, and fails."""

import json
import os
import sys

path = os.environ["TORCHELASTIC_ERROR_FILE"]
with open(path, "w") as file:
    json.dump({"message": {"message": "OddError: written by hand", "extraInfo": {"timestamp": "1"}}}, file)
sys.exit(6)
