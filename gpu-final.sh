export PYTHONUNBUFFERED=1 PATCHCLEANSER_CACHE=$PWD/runs/engine/data PYTHONPATH=src:tests
cat > /tmp/split.py <<'P'
import subprocess, sys
ids = [l for l in subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu", "--collect-only", "-q"], capture_output=True, text=True).stdout.splitlines() if "::" in l]
print(len(ids), "tests")
parts = [ids[n::8] for n in range(8)]
running = [subprocess.Popen([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "-q", "-rs", *part], stdout=open(f"/tmp/part{n}", "w"), stderr=subprocess.STDOUT) for n, part in enumerate(parts)]
for n, process in enumerate(running):
    process.wait(); print(n, process.returncode, flush=True); print(open(f"/tmp/part{n}").read()[-1500:], flush=True)
P
date; timeout 215 python3 /tmp/split.py
date; timeout 60 python3 benchmarks/coarse.py --precision fast --settings 0 1 3
date; timeout 40 python3 benchmarks/coarse.py --precision exact --images 1000 --settings 0 3
date
