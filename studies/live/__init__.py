"""Does AutoLoader keep what it promises, and what does it cost?"""
