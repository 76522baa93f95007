"""The forms of tool calls and reasoning, one file each; ../form.py finds them."""
