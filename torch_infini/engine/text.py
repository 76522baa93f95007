class TextStream:
    def __init__(self, tokenizer, prompt_tokens, params):
        self.t=tokenizer; self.out=[]; self.done=""; self.stopped=None
    def add(self, token):
        self.out.append(token); s=self.t.decode(self.out, skip_special_tokens=True); n=s[len(self.done):]; self.done=s; return n
    def finish(self): return ""
