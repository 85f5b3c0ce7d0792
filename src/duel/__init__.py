"""A working memory, and a policy that decides what it forgets."""
