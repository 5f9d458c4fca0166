"""Runs: `outrider.run` executes the stages of a run file.

runs/<name>/config.yaml  provenance.json  metrics.jsonl  answers/  checkpoint/  report.json  report.html
"""
