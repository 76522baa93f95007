"""Load on a server with OpenAI's interface, over HTTP: prompts, arrivals, what each request takes, and a report.

A client of any server: it imports no engine.
"""
