"""Started by bench/gpu_model.py: loads a model folder, writes one token, and tells when it had come how far.

python bench/gpu_start.py FOLDER DEVICE
"""

import json
import sys
import time

from bough import Engine, SamplingParams

if __name__ == "__main__":
    times = {"imported": time.time()}
    folder, device = sys.argv[1:]
    with Engine.load(folder, device=device) as engine:
        times["loaded"] = time.time()
        prompt = "Once upon a time, in a small village by the sea,"
        next(engine.stream(prompt, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)))
        times["first_token"] = time.time()
        print(json.dumps(times), flush=True)
