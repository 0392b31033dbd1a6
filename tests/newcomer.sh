#!/usr/bin/env bash
# A newcomer's first ten minutes, with nothing but a wheel: install it into a fresh venv, run the README's Python, then
# take a raw hotel log to a trained and served model, rank by curl, report clicks, retrain and reload.
#
#   tests/newcomer.sh         needs curl and a package index; $PYTHON is the interpreter of the venv
#
# The hotel log is expedia/searches.csv.gz in $URANK_DATA or ../shared/data; without it, that part is skipped.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
log=${URANK_DATA:-$root/../shared/data}/expedia/searches.csv.gz
work=$(mktemp -d)
server=
unset PYTHONPATH URANK_API_KEY

finish() {
    local status=$?
    if [[ -n $server ]]; then
        kill "$server" 2>/dev/null || true
        wait "$server" 2>/dev/null || true
    fi
    if ((status)) && [[ -s $work/server.txt ]]; then cat "$work/server.txt" >&2; fi
    rm -rf "$work"
    exit "$status"
}
trap finish EXIT

step() { printf '%4d s  %s\n' "$SECONDS" "$1"; }
fail() { printf 'Failed: %s\n' "$1" >&2; exit 1; }
post() { curl --silent --show-error --fail-with-body --max-time 60 -H 'content-type: application/json' "$url$1" -d "@$2"; }

step 'build the wheel, and install it without extras'
cd "$work"
"${PYTHON:-python3}" -m venv venv
bin=$work/venv/bin
"$bin/pip" wheel --quiet --no-deps --wheel-dir dist "$root"
wheel=$(ls dist/*.whl)
"$bin/pip" install --quiet --constraint "$root/constraints.txt" "$wheel"

step "run the README's Python"
sed -n '/^```python$/,/^```$/p' "$root/README.md" | sed '/^```/d' > quick_start.py
"$bin/python" quick_start.py
[[ -f model/manifest.json ]] || fail "the README's Python saved no model"

step 'miss an extra, and install it'
if "$bin/urank" serve model 2> refusal.txt; then fail 'served without the extra'; fi
grep -q "pip install 'urank\[serve\]'" refusal.txt || fail "no remedy for the missing extra: $(cat refusal.txt)"
"$bin/pip" install --quiet --constraint "$root/constraints.txt" "$wheel[serve]"

if [[ ! -f $log ]]; then
    step "skipped the hotel log: $log does not exist; set URANK_DATA"
    exit
fi

step 'the hotel log: from the raw CSV to a model and a report'
cp "$log" searches.csv.gz
"$bin/urank" run searches.csv.gz -o job --quiet
[[ -f job/report.html ]] || fail 'no report'

step 'serve it'
: > server.txt
"$bin/urank" serve job/model --port 0 --log served --explore swap:0.1 > server.txt 2>&1 &
server=$!
for _ in {1..300}; do
    url=$(sed -nE 's/.* at (http:[^;[:space:]]+:[0-9]+).*/\1/p' server.txt | head -n 1)
    if [[ -n $url ]] && curl --silent --fail --output /dev/null "$url/readyz"; then break; fi
    kill -0 "$server" || fail 'the server ended'
    sleep 0.1
done
version() { curl --silent --fail "$url/v1/model" | "$bin/python" -c 'import json, sys; print(json.load(sys.stdin)["version"])'; }
before=$(version)

step 'rank 400 searches by curl, and report their clicks'
curl --silent --fail "$url/v1/model" > served.json
cat > searches.py <<'PYTHON'
"""Write requests for the first searches of the log, with the features that the server asks for."""
import json

import polars as pl

asked = json.load(open("served.json"))["features"]
features = [*asked["numeric"], *asked["categorical"]]
log = pl.read_csv("searches.csv.gz", infer_schema_length=None)
queries = []
for search in log.partition_by("srch_id", maintain_order=True)[:400]:
    items = [str(item) for item in search["prop_id"]]
    queries.append(
        {
            "query_id": str(search["srch_id"][0]),
            "item_id": items,
            "features": search.select(features).to_dict(as_series=False),
        }
    )
json.dump(queries[0], open("one.json", "w"))
for number in range(0, len(queries), 50):
    json.dump({"queries": queries[number : number + 50]}, open(f"batch-{number:03}.json", "w"))
PYTHON
"$bin/python" searches.py
post /v1/rank one.json > answer.json
for batch in batch-*.json; do post /v1/rank "$batch" > "answer-$batch"; done
cat > clicks.py <<'PYTHON'
"""Write the clicks of the log on the lists that the server ranked."""
import json
from pathlib import Path

import polars as pl

best = json.load(open("answer.json"))["items"]
assert [item["position"] for item in best] == list(range(1, len(best) + 1)), best
assert all(0 < item["probability"] < 1 for item in best), best
log = pl.read_csv("searches.csv.gz", infer_schema_length=None).filter(pl.col("click_bool") == 1)
clicked = set(zip(log["srch_id"].cast(pl.String), log["prop_id"].cast(pl.String)))
answers = [json.loads(path.read_text())["rankings"] for path in sorted(Path().glob("answer-batch-*.json"))]
events = [
    {"ranking_id": ranking["ranking_id"], "item_id": item["item_id"]}
    for rankings in answers
    for ranking in rankings
    for item in ranking["items"]
    if (ranking["query_id"], item["item_id"]) in clicked
]
assert len(events) > 300, len(events)
json.dump({"events": events}, open("events.json", "w"))
PYTHON
"$bin/python" clicks.py
post /v1/feedback events.json > /dev/null

step 'retrain on what was served, and reload'
"$bin/urank" feedback served
"$bin/urank" train served/log -o job/model --overwrite --quiet
kill -HUP "$server"
for _ in {1..100}; do
    after=$(version)
    if [[ $after != "$before" ]]; then break; fi
    sleep 0.1
done
[[ $after != "$before" ]] || fail 'the server did not load the new model'
post /v1/rank one.json > again.json

step "done: model $before was replaced by $after"
