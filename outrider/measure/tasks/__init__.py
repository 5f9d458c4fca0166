"""What is measured on: prompt sets by name, and whether an answer is right."""
