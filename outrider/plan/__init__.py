"""Before anything is trained or served: will speculation pay, which method, how deep, and what does it cost."""
