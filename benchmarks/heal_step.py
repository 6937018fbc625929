def run(*a,**k): return []
