# One end of a VPN to another cloud, if var.peered. Its address exists before the other end does.
locals {
  peered = var.peered ? 1 : 0
}

resource "google_compute_address" "vpn" {
  count  = local.peered
  name   = "${var.name}-vpn"
  region = var.region
}

resource "google_compute_vpn_gateway" "this" {
  count   = local.peered
  name    = var.name
  region  = var.region
  network = google_compute_network.this.id
}

resource "google_compute_forwarding_rule" "vpn" {
  for_each    = var.peered ? { esp = ["ESP", null], ike = ["UDP", "500"], nat = ["UDP", "4500"] } : {}
  name        = "${var.name}-${each.key}"
  region      = var.region
  ip_protocol = each.value[0]
  port_range  = each.value[1]
  ip_address  = google_compute_address.vpn[0].address
  target      = google_compute_vpn_gateway.this[0].id
}

resource "google_compute_vpn_tunnel" "peer" {
  count                   = local.peered
  name                    = "${var.name}-peer"
  region                  = var.region
  target_vpn_gateway      = google_compute_vpn_gateway.this[0].id
  peer_ip                 = var.peer.address
  shared_secret           = var.peer.secret
  ike_version             = 1
  local_traffic_selector  = ["0.0.0.0/0"]
  remote_traffic_selector = ["0.0.0.0/0"]
  depends_on              = [google_compute_forwarding_rule.vpn]
}

resource "google_compute_route" "peer" {
  for_each            = toset(var.peered ? var.peer_cidrs : [])
  name                = "${var.name}-peer-${replace(replace(each.key, ".", "-"), "/", "-")}"
  network             = google_compute_network.this.id
  dest_range          = each.key
  next_hop_vpn_tunnel = google_compute_vpn_tunnel.peer[0].id
}

resource "google_compute_firewall" "engines_from_peer" {
  count         = local.peered
  name          = "${var.name}-engines-from-peer"
  network       = google_compute_network.this.id
  source_ranges = var.peer_cidrs
  allow {
    protocol = "tcp"
    ports    = ["8000", "5557", "6557"]
  }
}
