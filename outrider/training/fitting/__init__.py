"""What is fitted on the target's own texts once a draft model is trained, or in place of training one."""
