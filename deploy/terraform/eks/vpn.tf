# One end of a VPN to another cloud, if var.peer is set.
locals {
  peered = var.peer == null ? 0 : 1
}

resource "aws_vpn_gateway" "this" {
  count  = local.peered
  vpc_id = aws_vpc.this.id
}

resource "aws_customer_gateway" "peer" {
  count      = local.peered
  bgp_asn    = 65000
  ip_address = var.peer.address
  type       = "ipsec.1"
}

resource "aws_vpn_connection" "peer" {
  count               = local.peered
  vpn_gateway_id      = aws_vpn_gateway.this[0].id
  customer_gateway_id = aws_customer_gateway.peer[0].id
  type                = "ipsec.1"
  static_routes_only  = true
}

resource "aws_vpn_connection_route" "peer" {
  for_each               = toset(var.peer == null ? [] : var.peer.cidrs)
  vpn_connection_id      = aws_vpn_connection.peer[0].id
  destination_cidr_block = each.key
}

resource "aws_security_group_rule" "engines_from_peer" {
  count             = local.peered
  security_group_id = aws_eks_cluster.this.vpc_config[0].cluster_security_group_id
  type              = "ingress"
  description       = "Engines: HTTP, KV events and their replay"
  protocol          = "tcp"
  from_port         = 5557
  to_port           = 8000
  cidr_blocks       = var.peer.cidrs
}
