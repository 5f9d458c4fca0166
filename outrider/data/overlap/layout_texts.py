"""The texts that task layouts put around a question.

`measure.tasks.layouts` builds prompts from them, and `units` leaves them out of comparisons.
"""

STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."
WITH_TESTS = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{stub}\n```"
INPUT = "\n\n### Input:\n{input}"
WITH_STARTER = "Begin with this code and keep its names:\n```python\n{starter}\n```"
WITH_STDIN = "Read from standard input, write to standard output:\n```python\n# your program\n```"
CONTEST = (
    "You are an expert Python programmer. Answer the question below with one complete Python program that does what it "
    "says and passes all of its tests.\n\n### Question\n{question}\n\n### Format\n{form}\n\n### Answer\n"
)
LAYOUTS = (STEP_BY_STEP, WITH_TESTS, INPUT, WITH_STARTER, WITH_STDIN, CONTEST)
"""All layouts; names in braces are replaced by fields of the row."""
