# A GKE cluster with a small node pool for the router and a GPU node pool for the engines. Pods have addresses of the
# VPC (VPC-native), so that a router elsewhere reaches them through a VPN.
terraform {
  required_version = ">= 1.5"
  required_providers {
    google = {
      source  = "hashicorp/google"
      version = "~> 6.0"
    }
  }
}

resource "google_compute_network" "this" {
  name                    = var.name
  auto_create_subnetworks = false
}

resource "google_compute_subnetwork" "this" {
  name          = var.name
  region        = var.region
  network       = google_compute_network.this.id
  ip_cidr_range = var.cidrs.nodes
  secondary_ip_range {
    range_name    = "pods"
    ip_cidr_range = var.cidrs.pods
  }
  secondary_ip_range {
    range_name    = "services"
    ip_cidr_range = var.cidrs.services
  }
}

resource "google_container_cluster" "this" {
  name                     = var.name
  location                 = var.region
  network                  = google_compute_network.this.id
  subnetwork               = google_compute_subnetwork.this.id
  remove_default_node_pool = true
  initial_node_count       = 1
  deletion_protection      = false
  ip_allocation_policy {
    cluster_secondary_range_name  = "pods"
    services_secondary_range_name = "services"
  }
}

resource "google_container_node_pool" "routers" {
  name       = "routers"
  cluster    = google_container_cluster.this.id
  node_count = 1
  node_config {
    machine_type = var.router_machine_type
    oauth_scopes = ["https://www.googleapis.com/auth/cloud-platform"]
  }
}

resource "google_container_node_pool" "gpus" {
  name           = "gpus"
  cluster        = google_container_cluster.this.id
  node_locations = [var.gpu_zone]
  autoscaling {
    total_min_node_count = var.gpu_nodes.min
    total_max_node_count = var.gpu_nodes.max
  }
  node_config {
    machine_type = var.gpu_machine_type
    disk_size_gb = 200
    oauth_scopes = ["https://www.googleapis.com/auth/cloud-platform"]
    labels       = { "warmroute-gpu" = lower(var.gpu) }
    guest_accelerator {
      type  = var.accelerator
      count = 1
      gpu_driver_installation_config {
        gpu_driver_version = "LATEST"
      }
    }
  }
}
