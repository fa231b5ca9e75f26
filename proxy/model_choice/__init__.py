"""Which of several models answers a request that leaves the choice to the proxy.

A sans-IO package: a choice is asked at a request's arrival, with what each group of engines would
make of it; training and judgement ask it in virtual time.

Source: Jha and Chuppala, "Quality-of-Service Aware LLM Serving", sections 4.2 and 5.1.
"""
