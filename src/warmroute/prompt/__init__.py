"""From a request's bytes to its prompt: the model, and the tokens that the engine will compute.

    reader.py             reads a prompt on the event loop, in a thread, or with the help of a node
    request_body.py       what a body says, without parsing all of it
    multipart.py          the fields of a form (audio)
    other_apis.py         bodies of Anthropic's and OpenAI's newer APIs as chats
    prompt_tokenizer.py   from a body of any path to a prompt
      plain_chats.py        a chat as the tokens of its messages, where that is proved to be exact
      chat_tokenizer.py     a chat through its template: only what is new in a conversation is tokenized
      chat_template.py      renders a template as engines do; template_limits.py bounds what it costs
    tokenizer.py          a model's tokenizer; hub.py finds its files; registry.py knows which model has which one

A prompt without a tokenizer is matched by its text. What is certain of a prompt, and what is not, is part of it
(prompt.py): a wrong token is never taken for the engine's.
"""
