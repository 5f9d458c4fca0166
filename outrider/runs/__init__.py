"""A run file is one draft model's life; `outrider.run` goes through its stages.

runs/<name>/config.yaml  provenance.json  metrics.jsonl  answers/  checkpoint/  report.json  report.html
"""
