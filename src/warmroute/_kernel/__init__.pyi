# ruff: noqa: F403
# What Python sees of the kernel, by part: each stub describes what the C file of the same name defines. At run time
# there is one extension module, and all names are imported from `warmroute._kernel`.
from warmroute._kernel.accounting import *
from warmroute._kernel.block_hash import *
from warmroute._kernel.body_buffer import *
from warmroute._kernel.body_scan import *
from warmroute._kernel.capture_ids import *
from warmroute._kernel.digest import *
from warmroute._kernel.exit_deadline import *
from warmroute._kernel.first_token import *
from warmroute._kernel.first_token_order import *
from warmroute._kernel.hits import *
from warmroute._kernel.http_chunks import *
from warmroute._kernel.http_head import *
from warmroute._kernel.index import *
from warmroute._kernel.message_tokens import *
from warmroute._kernel.peer_load import *
from warmroute._kernel.price import *
from warmroute._kernel.recency import *
from warmroute._kernel.response_tail import *
from warmroute._kernel.routing_hash import *
from warmroute._kernel.socket_poller import *
from warmroute._kernel.traffic import *
from warmroute._kernel.usage import *
