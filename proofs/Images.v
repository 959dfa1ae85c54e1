(** * Images, masks, patches and classifiers

    The words of all other files. Pixels, their values and the answers of a classifier are of any type, so one proof
    holds for images of every size, for any fill colour, and for feature maps as well. *)

From Coq Require Import List Bool Arith Lia.
Import ListNotations.

Notation label := nat (only parsing).

Section Images.
  Context {pixel value answer : Type}.

  Definition image := pixel -> value.

  (** A set of pixels: those that a mask hides, or those of a patch. *)
  Definition region := pixel -> bool.

  Definition union (first second : region) : region := fun p => first p || second p.

  Definition hides (mask patch : region) : Prop := forall p, patch p = true -> mask p = true.

  (** The patches an attacker may use. Several patches at once are one region. *)
  Definition threat := region -> Prop.

  Definition attacked (R : threat) (x x' : image) : Prop :=
    exists patch, R patch /\ forall p, patch p = false -> x' p = x p.

  (** A classifier with masks: its answer for an image of which it sees only what the mask leaves visible. It may know
      the mask, as a transformer that drops hidden tokens does. *)
  Definition masked_classifier := region -> image -> answer.

  (** The one assumption about it: the answer is a function of the mask and of the visible pixels. *)
  Definition function_of_visible (F : masked_classifier) : Prop :=
    forall mask mask' x x',
      (forall p, mask p = mask' p) -> (forall p, mask p = false -> x p = x' p) -> F mask x = F mask' x'.

  Variable F : masked_classifier.
  Hypothesis visible : function_of_visible F.

  Lemma hidden_patch_changes_no_answer : forall mask patch x x',
    hides mask patch -> (forall p, patch p = false -> x' p = x p) -> F mask x' = F mask x.
  Proof.
    intros mask patch x x' Hhides Hsame. apply visible; [reflexivity|].
    intros p Hp. apply Hsame. destruct (patch p) eqn:E; [|reflexivity].
    apply Hhides in E. congruence.
  Qed.

  Lemma union_hides_what_the_first_hides : forall first second patch,
    hides first patch -> hides (union first second) patch.
  Proof. intros first second patch H p Hp. unfold union. now rewrite (H p Hp). Qed.

  Lemma two_masks_commute : forall first second x, F (union first second) x = F (union second first) x.
  Proof. intros. apply visible; [|reflexivity]. intro p. apply orb_comm. Qed.

  Lemma a_mask_twice_is_the_mask : forall mask x, F (union mask mask) x = F mask x.
  Proof. intros. apply visible; [|reflexivity]. intro p. apply orb_diag. Qed.

  (** ** Mask sets and the labels under them *)

  Variable masks : list region.

  Definition mask (i : nat) : region := nth i masks (fun _ => false).

  Definition one_mask_labels (x : image) : list answer := map (fun m => F m x) masks.

  Definition pair_label (x : image) (i j : nat) : answer := F (union (mask i) (mask j)) x.

  Definition row_labels (x : image) (i : nat) : list answer := map (pair_label x i) (seq 0 (length masks)).

  (** The paper's R-covering. *)
  Definition covers (R : threat) : Prop :=
    forall patch, R patch -> exists i, i < length masks /\ hides (mask i) patch.

  Lemma one_mask_label_is_a_pair_label : forall x i d,
    i < length masks -> nth i (one_mask_labels x) d = pair_label x i i.
  Proof.
    intros x i d Hi. unfold one_mask_labels, pair_label, mask.
    rewrite a_mask_twice_is_the_mask.
    rewrite nth_indep with (d' := F (fun _ => false) x) by now rewrite map_length.
    now rewrite map_nth with (f := fun m => F m x).
  Qed.

  Lemma pair_label_commutes : forall x i j, pair_label x i j = pair_label x j i.
  Proof. intros. apply two_masks_commute. Qed.

  Lemma row_has_every_pair : forall x i j, j < length masks -> In (pair_label x i j) (row_labels x i).
  Proof. intros. apply in_map. apply in_seq. lia. Qed.

  Lemma row_has_only_pairs : forall x i l,
    In l (row_labels x i) -> exists j, j < length masks /\ l = pair_label x i j.
  Proof.
    intros x i l H. apply in_map_iff in H. destruct H as [j [E Hj]]. apply in_seq in Hj.
    exists j. split; [lia | congruence].
  Qed.
End Images.

Arguments image : clear implicits.
Arguments region : clear implicits.
Arguments threat : clear implicits.
Arguments masked_classifier : clear implicits.
