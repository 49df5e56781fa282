"""On the path of a rank, plants the fault that the environment's FAULT names: "RANK STAGE STEP WHAT"."""

import atexit
import json
import os
import signal
import sys
import time

# Ranks that `generate` starts and those of torchrun.
if "FAULT" in os.environ and ("SAFELIGHT_RANK" in os.environ or "RANK" in os.environ):
    own = json.loads(os.environ["SAFELIGHT_RANK"])["rank"] if "SAFELIGHT_RANK" in os.environ else os.environ["RANK"]
    rank, stage, step, what = os.environ["FAULT"].split()

    def happen():
        print(f"fault at {time.time()}", file=sys.stderr, flush=True)
        if what == "raise":
            from safelight.errors import GenerationError

            raise GenerationError("planted")
        if what == "bug":
            raise LookupError("planted")
        if what == "slow-bug":
            # Its links are closed before it has ended.
            atexit.register(time.sleep, 3)
            raise LookupError("planted")
        if what == "exit":
            os._exit(7)
        if what == "slow-exit":
            import torch.distributed as dist

            dist.destroy_process_group()
            time.sleep(3)
            os._exit(7)
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    if int(own) == int(rank):
        import safelight.engine

        tell = safelight.engine._tell

        def told(report, at, done, num_steps, started_s):
            tell(report, at, done, num_steps, started_s)
            if at == stage and done == int(step):
                happen()

        safelight.engine._tell = told
